"""Trainers: each reads from top to bottom like the algorithm's box in a paper."""
