"""One command for each claim about speed. See README.md beside this file."""
