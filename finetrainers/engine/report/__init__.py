"""`finetrainers report`: one HTML page on one run or several, from what is in their directories. Imports no torch."""
