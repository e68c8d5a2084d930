"""Documents in, passages out: parsing, chunks, the index and its search. It knows neither HTTP nor routes."""
