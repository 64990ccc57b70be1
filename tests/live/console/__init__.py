"""The console in a real Chromium, against a real planning API and a real fleet of emulated workers."""
