"""The graph of a traced hook: typed, canonical, independent of torch; its form as a document."""
