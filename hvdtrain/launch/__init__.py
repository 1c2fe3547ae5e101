"""Where ranks are and how they find each other."""
