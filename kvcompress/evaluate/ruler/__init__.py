"""RULER's 13 tasks (Hsieh et al. 2024, github.com/NVIDIA/RULER), made by their definitions in synthetic.yaml.

What differs from the authors' program: words and keys come from lists and texts that are here (they take wonderwords),
no key is given twice, and where the haystack is a text it is the user's, or the standard library's source in lines,
instead of Paul Graham's essays.
"""
