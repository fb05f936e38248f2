"""Fields of a `config.json` that change nothing, and the values of others at which they do not."""

import json

import pytest

from mla_fx.effects import InputError
from mla_fx.models.config_file import parse_config
from tests.models.test_config import GIVEN, PUBLISHED, SCALING, read

#: As transformers 4 writes them with `to_json_string(use_diff=False)`, whatever the model.
IN_FULL = json.loads("""{
    "add_cross_attention": false, "bad_words_ids": null, "begin_suppress_tokens": null, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": null, "decoder_start_token_id": null, "diversity_penalty": 0.0, "do_sample": false,
    "early_stopping": false, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": null,
    "finetuning_task": null, "forced_bos_token_id": null, "forced_eos_token_id": null, "id2label": {"0": "LABEL_0",
    "1": "LABEL_1"}, "is_decoder": false, "is_encoder_decoder": false, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "output_attentions": false, "output_hidden_states": false,
    "output_scores": false, "prefix": null, "problem_type": null, "pruned_heads": {}, "remove_invalid_values": false,
    "repetition_penalty": 1.0, "return_dict": true, "return_dict_in_generate": false, "sep_token_id": null,
    "suppress_tokens": null, "task_specific_params": null, "temperature": 1.0, "tf_legacy_loss": false,
    "tie_encoder_decoder": false, "tokenizer_class": null, "top_k": 50, "top_p": 1.0, "torchscript": false,
    "typical_p": 1.0, "use_bfloat16": false
}""")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_full_configuration_of_transformers_4(name):
    assert parse_config({**PUBLISHED[name], **IN_FULL}) == read(name)


@pytest.mark.parametrize("field", ["pruned_heads", "is_decoder", "use_bfloat16", "tie_encoder_decoder", "torchscript"])
def test_fields_of_transformers_that_would_change_something(field):
    with pytest.raises(InputError, match=rf"{field}: only (False|{{}}) is supported: got True"):
        parse_config({**GIVEN, field: True})


def test_nulls_and_defaults_of_the_published_code_change_nothing():
    more = {"sliding_window": None, "anything": None, "use_sliding_window": False, "partial_rotary_factor": 1.0}
    assert parse_config({**GIVEN, **more}) == parse_config(GIVEN)
    with pytest.raises(InputError, match=r"partial_rotary_factor: only 1.0 is supported: got 0.5"):
        parse_config({**GIVEN, "partial_rotary_factor": 0.5})


def test_both_forms_of_rotary_parameters_where_they_say_the_same():
    new = {**SCALING, "rope_type": "yarn", "rope_theta": 50000.0}
    assert parse_config({**GIVEN, "rope_parameters": new}) == parse_config(GIVEN)
    given = {name: value for name, value in GIVEN.items() if name != "rope_theta"}
    assert parse_config({**given, "rope_parameters": new}) == parse_config(GIVEN)
    plain = {**GIVEN, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50000}}
    assert parse_config({**plain, "rope_scaling": {"type": "default"}}) == parse_config(plain)
