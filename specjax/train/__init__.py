"""Tools that make what drafters read: token maps, data and heads."""
