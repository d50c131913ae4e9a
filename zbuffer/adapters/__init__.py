"""zbuffer in other libraries' places; each module is imported where it is used."""
