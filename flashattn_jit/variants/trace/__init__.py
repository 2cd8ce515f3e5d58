"""Tracing: each hook is called once on stand-ins and becomes a graph."""
