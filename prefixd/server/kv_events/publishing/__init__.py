"""Events for routers: the socket that publishes them, and the one that sends them again."""
