"""llama.cpp's server: the conversion of weights in Hugging Face's layout."""
