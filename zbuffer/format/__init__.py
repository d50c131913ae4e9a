"""The bytes of a buffer, pure: names, geometry, documents, codecs."""
