"""Tokenizer spec and protocol, chat templates, text streams; `stream` alone is standard library only, for guests."""
