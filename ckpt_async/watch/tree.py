from ckpt_async.formats.tree import Identity as Identity
from ckpt_async.formats.tree import Tree as Tree
from ckpt_async.formats.tree import files_of as files_of
