"""Custom collators: TRL's padded batches are converted to burnish's layout."""

import pytest
import torch
from script_runs import losses, make

from pair_runs import make_pair_workspace

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_pair_workspace(tmp_path_factory.mktemp("collators"))


def padded(sequences):
    width = max(map(len, sequences)) + 2
    return torch.tensor([[*one, *[0] * (width - len(one))] for one in sequences])


def sides(prompts, answers, prefix=""):
    ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return {f"{prefix}input_ids": padded(ids), f"{prefix}completion_mask": padded(masks),
            f"{prefix}attention_mask": padded([[1] * len(one) for one in ids])}  # fmt: skip


def collate_pairs(rows):
    answers = [row[f"{side}_ids"] for side in ("chosen", "rejected") for row in rows]
    return sides([row["prompt_ids"] for row in rows] * 2, answers)


def collate_labelled(rows):
    prompts = [row["prompt_ids"] for row in rows]
    mismatched = sides(prompts, [row["KL_completion_ids"] for row in rows], "KL_")
    return (
        sides(prompts, [row["completion_ids"] for row in rows]) | mismatched | {"label": [row["label"] for row in rows]}
    )


def collate_scored(rows):
    batch = sides([[]] * (2 * len(rows)), [row[f"{side}_ids"] for side in ("chosen", "rejected") for row in rows])
    del batch["completion_mask"]
    return batch | {"margin": torch.tensor([row["margin"] for row in rows])}


KINDS = {"DPOTrainer": collate_pairs, "KTOTrainer": collate_labelled, "RewardTrainer": collate_scored}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_trl_padding_collator_train_like_burnish_rows(kind, folder, tmp_path):
    own = losses(make(kind, folder / "model", tmp_path / "own"))
    assert losses(make(kind, folder / "model", tmp_path / "its", trainer_args={"data_collator": KINDS[kind]})) == own


@pytest.mark.parametrize("kind", KINDS)
def test_data_collator_pads_to_a_multiple(kind, folder, tmp_path):
    trainer = make(kind, folder / "model", tmp_path, pad_to_multiple_of=7)
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    assert batch["input_ids"].shape[1] % 7 == 0
    assert batch["attention_mask"].shape == batch["input_ids"].shape


def test_data_collator_passes_precomputed_log_probabilities_on(folder, tmp_path):
    for kind, keys in (
        ("DPOTrainer", {"ref_chosen_logps", "ref_rejected_logps"}), ("KTOTrainer", {"ref_logps", "ref_KL_logps"})
    ):  # fmt: skip
        trainer = make(kind, folder / "model", tmp_path / kind, precompute_ref_log_probs=True)
        assert keys <= trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]]).keys()


def test_changes_of_a_collator_are_trained(folder, tmp_path):
    def swapped(rows):
        return collate_pairs(
            [{**row, "chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]} for row in rows]
        )

    own = make("DPOTrainer", folder / "model", tmp_path / "own", precompute_ref_log_probs=True)
    its = make("DPOTrainer", folder / "model", tmp_path / "its", trainer_args={"data_collator": swapped},
               precompute_ref_log_probs=True)  # fmt: skip
    theirs = list(its.train_dataset["reference_rejected_logps"])
    assert list(own.train_dataset["reference_chosen_logps"]) == pytest.approx(theirs, rel=1e-6)
    assert losses(own) != losses(its)


def test_collator_without_completion_mask_is_rejected(folder, tmp_path):
    def bare(rows):
        return {name: value for name, value in collate_pairs(rows).items() if name != "completion_mask"}

    with pytest.raises(ValueError, match="must return input_ids, completion_mask"):
        losses(make("DPOTrainer", folder / "model", tmp_path, trainer_args={"data_collator": bare}))
