"""The domain model: data types, units, states, and the allowed transitions between states. The
package does no I/O and imports only the standard library and msgspec.
"""
