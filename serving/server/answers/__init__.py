"""Generation requests, from the parsed body to the response."""
