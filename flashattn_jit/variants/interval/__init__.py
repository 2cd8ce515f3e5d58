"""The interval form of a mask: which keys the rows of a tile can see, without asking every pair."""
