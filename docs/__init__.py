"""The pages of the site. `generator` writes parts of them and helps MkDocs to build it."""
