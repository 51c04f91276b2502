"""Explanation of a run in words: where its time went, and what would make it faster."""

from rudra.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
