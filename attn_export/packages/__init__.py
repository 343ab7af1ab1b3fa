"""Models by the names that their own packages give them; each package is imported when named."""
