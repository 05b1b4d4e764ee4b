"""HTTP: the operators' port and the users' port, both Starlette apps on uvicorn in the daemon's event loop."""
