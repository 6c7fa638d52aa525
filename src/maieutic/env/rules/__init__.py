"""The rule judge's parts: text without disguises, numbers and arithmetic in it, and one module a gate."""
