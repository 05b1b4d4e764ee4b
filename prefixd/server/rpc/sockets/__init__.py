"""The sockets: gRPC on the unix socket and on TCP, and the local door that hands out the arena."""
