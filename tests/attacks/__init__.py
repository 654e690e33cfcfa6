"""Task files by strangers: what they may hold, and what comes of it."""
