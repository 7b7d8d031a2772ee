"""What a model is worth on real data: sets (sets.py), a search for settings (search.py), programs (programs.py)."""
