"""A server whose draft learns: what joins `serving.server` and `serving.online`, which do not know each other."""
