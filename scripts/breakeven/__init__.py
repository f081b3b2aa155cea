"""Breakeven: train an EAGLE-3 drafter, serve it, and say whether speculation pays."""

__version__ = "0.1.0"
