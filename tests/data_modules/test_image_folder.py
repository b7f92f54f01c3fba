import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image
from torch.utils.data import DataLoader

from data_modules.image_folder import ImageFolder, check_images
from rankzero.messages import user_message
from rankzero.sampling.fingerprint import fingerprint


def write_tree(root, splits=("",), classes=("ant", "bee"), count=15, size=(40, 30), mode="RGB"):
    for folder in [root / split / name for split in splits for name in classes]:
        folder.mkdir(parents=True)
        for i in range(count):
            color = i * 10 if mode == "L" else (classes.index(folder.name) * 200, i * 10, 0)
            Image.new(mode, size, color).save(folder / f"{i}.png")
    return root


def set_up(root, **options):
    module = ImageFolder(str(root), **{"image_size": 16, "num_workers": 0, "batch_size": 4, **options})
    module.prepare_data()
    module.setup("fit")
    return module


def sizes_of(splits):
    return {split: len(samples) for split, samples in splits.items()}


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_tree_with_split_folders_is_read_also_with_grayscale_images(tmp_path, mode):
    module = set_up(write_tree(tmp_path, splits=("train", "val", "test"), mode=mode))
    assert sizes_of(module.splits) == {"train": 30, "val": 30, "test": 30}
    for loader in (module.train_dataloader(), module.val_dataloader()):
        images, labels = next(iter(loader))
        assert images.shape == (4, 3, 16, 16) and images.dtype is torch.float32 and labels.dtype is torch.int64
    assert (module.num_classes, module.in_channels, module.classes) == (2, 3, ["ant", "bee"])


@pytest.mark.parametrize("splits", [("",), ("train",)])
def test_a_tree_without_val_and_test_is_split_by_seed_without_overlap(tmp_path, splits):
    root = write_tree(tmp_path, splits=splits)
    first, repeated = set_up(root).splits, set_up(root).splits
    assert first == repeated and sizes_of(first) == {"train": 24, "val": 3, "test": 3}
    assert len({path for samples in first.values() for path, _ in samples}) == 30


def test_a_tree_with_test_but_without_val_holds_out_the_validation_split_only(tmp_path):
    splits = set_up(write_tree(tmp_path, splits=("train", "test"))).splits
    assert sizes_of(splits) == {"train": 27, "val": 3, "test": 30}
    assert all(path.is_relative_to(tmp_path / "test") for path, _ in splits["test"])
    other_paths = {path for split in ("train", "val") for path, _ in splits[split]}
    assert len(other_paths) == 30 and all(path.is_relative_to(tmp_path / "train") for path in other_paths)


def test_a_folder_or_split_that_is_missing_or_has_no_or_too_few_images_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        ImageFolder(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="contains no folders"):
        ImageFolder(str(tmp_path))
    (tmp_path / "ant").mkdir()
    with pytest.raises(FileNotFoundError, match="have no file with a known suffix"):
        set_up(tmp_path)
    with pytest.raises(ValueError, match="too few"):
        set_up(write_tree(tmp_path / "few", count=2))
    with pytest.raises(FileNotFoundError, match="--split val"):
        set_up(write_tree(tmp_path / "untested", splits=("train", "val"))).test_dataloader()
    for split in ("val", "test"):
        write_tree(tmp_path / f"other-{split}", splits=("train",))
        with pytest.raises(ValueError, match="cat"):  # a class without training images
            set_up(write_tree(tmp_path / f"other-{split}", splits=(split,), classes=("ant", "cat")))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"no image"])
def test_the_error_names_a_damaged_image_that_is_checked_within_the_time_limit(tmp_path, damage):
    path = write_tree(tmp_path, size=(200, 200)) / "ant" / "7.png"
    path.write_bytes(damage(path.read_bytes()))
    check_images([path], seconds=-1)
    with pytest.raises(ValueError, match=r"corrupt: .*ant/7\.png"):
        set_up(tmp_path)


def test_reading_names_a_damaged_image_that_was_not_checked(tmp_path):
    module = set_up(write_tree(tmp_path))
    for path, _ in module.splits["val"]:
        path.write_bytes(b"")
    batches = iter(DataLoader(module.val_dataloader().dataset, num_workers=1))
    with pytest.raises(ValueError, match=r"corrupt: .*png") as error:
        list(batches)
    batches._shutdown_workers()  # without waiting for the garbage collection
    assert str(user_message(error.value)).startswith("corrupt: ")


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_a_run_on_a_gpu_normalizes_there_what_its_loaders_read_as_bytes(tmp_path, precision, dtype):
    on_cpu = set_up(write_tree(tmp_path, splits=("train", "val")))
    on_gpu = ImageFolder(str(tmp_path), image_size=16, num_workers=0, batch_size=4)
    on_gpu.trainer = Trainer(accelerator="cpu", logger=False, precision=precision)
    on_gpu.trainer.strategy._root_device = torch.device("cuda", 0)
    on_gpu.setup("fit")
    expected, batch = (next(iter(module.val_dataloader())) for module in (on_cpu, on_gpu))
    assert batch[0].dtype is torch.uint8
    images, labels = on_gpu.on_after_batch_transfer(batch, 0)
    torch.testing.assert_close(images, expected[0].to(dtype))
    assert torch.equal(labels, expected[1]) and "on_after_batch_transfer" not in vars(on_cpu)
    model = BoringModel()
    model.on_after_batch_transfer = lambda batch, dataloader_idx: batch
    own_hook = ImageFolder(str(tmp_path), image_size=16, num_workers=0, batch_size=4)
    own_hook.trainer = on_gpu.trainer
    own_hook.trainer.strategy._lightning_module = model
    own_hook.setup("fit")  # the hook of the data module would replace the model's
    assert next(iter(own_hook.val_dataloader()))[0].dtype is torch.float32
    data = [module.val_dataloader().dataset for module in (on_cpu, on_gpu)]
    assert fingerprint(data[0], 30) == fingerprint(data[1], 30)  # a run may resume on the other device
