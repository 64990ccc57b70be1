"""The Python library behind `import tokenfleet`, which the command line uses too (docs/python.md)."""
