"""Attention variants: what attention computes, without shapes or devices."""
