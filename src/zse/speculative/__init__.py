"""Drafts: guesses of the next tokens of a request, which one step verifies together. Lossless: see speculator.py."""
