"""A bundle's report: what was found, proved and measured, as one HTML file."""
