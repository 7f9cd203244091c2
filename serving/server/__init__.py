"""HTTP server around the engine, with OpenAI's interface (`distill serve`)."""
