"""The catalogue of fixes: does it apply, what would it do, how to read its prediction."""
