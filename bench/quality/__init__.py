"""Quality of models on real data: sets (sets.py), a search for settings (search.py), programs (programs.py)."""
