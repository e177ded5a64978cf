"""OpenAI-compatible HTTP server in front of one engine. Importing it imports no torch."""
