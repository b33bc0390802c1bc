"""Cases of vectors.json by the functions of megarl.algos: each module has its share of the file's functions."""
