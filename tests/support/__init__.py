"""What the numeric and end-to-end tests share; conftest.py puts it on the path."""
