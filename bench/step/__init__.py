"""The sides of bench_click_step.py: whole steps of click models."""
