"""A run as eyas gives it to torch: every row, then batches of a DataLoader with workers."""

import json
import pickle
import sys
from functools import partial
from pathlib import Path

from torch.utils.data import DataLoader

from eyas import open_run
from eyas.torch_data import collate


def main() -> None:
    run, options, answer = sys.argv[1:]
    data = open_run(run).torch(**json.loads(options))
    rows = [data[at] for at in range(len(data))]
    lists = [{name: value.tolist() for name, value in row.items()} for row in rows]
    batches = {}
    for context in ("fork", "spawn"):
        loader = DataLoader(
            data, batch_size=7, num_workers=2, multiprocessing_context=context,
            collate_fn=partial(collate, pad_id=9),
        )  # fmt: skip
        batches[context] = [
            {name: value.tolist() for name, value in batch.items()} for batch in loader
        ]
    again = pickle.loads(pickle.dumps(data))
    assert again[-1]["input_ids"].tolist() == lists[-1]["input_ids"]
    try:
        data[len(data)]
    except IndexError:
        pass
    else:
        raise AssertionError("there is a row behind the last one")
    path = Path(data._path)
    assert path.exists()
    result = {
        "rows": lists,
        "ids": [data.row_id(at) for at in range(len(data))],
        "left_out": data.left_out,
        "batches": batches,
        "dtypes": sorted({str(value.dtype) for row in rows for value in row.values()}),
    }
    del again, data, loader
    assert not path.exists()
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
