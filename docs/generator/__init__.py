"""What makes the site of docs/: pictures, the catalogue, hooks of MkDocs, snippets of pages."""
