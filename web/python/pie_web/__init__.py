"""The page's half of pie_core: devices, weights and inferlets behind JavaScript objects. Runs in Pyodide, in the engine worker."""
