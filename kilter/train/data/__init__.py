"""Training data: files to packs, the same packs in the same order on any number of ranks.

    files ─ sources ─► records ─ tokenise ─► documents ─ cache ─► tokens and lengths on disk
    lengths ─ corpus ─► units ─ order ─► the epoch's row ─ packing ─► packs ─ loader ─► steps
"""

from kilter.train.data.config import ChatConfig, DataConfig, SourceConfig
from kilter.train.data.corpus import IGNORE, Corpus, Counts, Data, SampleId, open_data
from kilter.train.data.errors import DataError
from kilter.train.data.loader import DataLoader, corpus_packs, evaluation_packs
from kilter.train.data.packing import Pack

__all__ = ["IGNORE", "ChatConfig", "Corpus", "Counts", "Data", "DataConfig", "DataError",
           "DataLoader", "Pack", "SampleId", "SourceConfig", "corpus_packs", "evaluation_packs",
           "open_data"]
