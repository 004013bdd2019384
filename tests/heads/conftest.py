import pytest
from make_tokenizers import make_byte_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()
