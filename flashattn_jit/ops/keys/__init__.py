"""Where keys lie and which of them are visited: ragged, paged, sparse."""
