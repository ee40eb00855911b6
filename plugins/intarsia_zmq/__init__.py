"""Intarsia over ZeroMQ: messages, sessions, fair admission. docs/wire-protocol.md says what goes over the wire."""
