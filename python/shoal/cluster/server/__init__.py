"""The server: endpoints that serve rows."""
