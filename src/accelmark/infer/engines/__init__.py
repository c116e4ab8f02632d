"""Engines, one file each: the file's name is the name that ``compiler`` gives."""
