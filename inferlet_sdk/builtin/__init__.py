"""The built-in APIs: inferlets like any other, to be read, copied and changed."""
