"""The client: trains, scores, compresses, talks. Never imports the server."""
