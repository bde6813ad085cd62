"""A step's data: its upload, the gather of its tokens, the update after it."""
