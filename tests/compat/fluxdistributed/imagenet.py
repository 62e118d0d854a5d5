"""Real digits in ImageNet's layout: JPEG files, solutions, the mapping of synsets."""

import csv

from PIL import Image
from sklearn.datasets import load_digits

SYNSETS = [f"n{1000 + 7 * digit:08d}" for digit in range(10)]
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SIDE = 32


def write_imagenet(folder, *, train, val):
    """So many of each digit."""
    found = load_digits()
    data = folder / "ILSVRC" / "Data" / "CLS-LOC"
    rows = {"train": [], "val": []}
    taken = dict.fromkeys(range(10), 0)
    for image, digit in zip(found.images, map(int, found.target), strict=True):
        number = taken[digit]
        taken[digit] += 1
        if number >= train + val:
            continue
        split = "train" if number < train else "val"
        synset = SYNSETS[digit]
        if split == "train":
            name, place = f"{synset}_{number}", data / "train" / synset
        else:
            name, place = f"ILSVRC2012_val_{len(rows['val']) + 1:08d}", data / "val"
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((image * 255 / 16).astype("uint8")).convert("RGB")
        picture.resize((SIDE, SIDE)).save(place / f"{name}.JPEG", quality=95)
        rows[split].append([name, f"{synset} 1 1 30 30"])
    for split, some in rows.items():
        with (folder / f"LOC_{split}_solution.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["ImageId", "PredictionString"], *some])
    lines = (f"{synset} {name}\n" for synset, name in zip(SYNSETS, NAMES, strict=True))
    (folder / "LOC_synset_mapping.txt").write_text("".join(lines))
