//! Text corpora, tokenizers, packing, and a cursor that resumes on any number of ranks
